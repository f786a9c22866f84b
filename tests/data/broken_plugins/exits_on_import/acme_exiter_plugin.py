"""A plugin that ends the program of whoever imports it."""

import sys

sys.exit("acme is out of date")
