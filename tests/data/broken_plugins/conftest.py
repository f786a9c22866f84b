"""Keep pytest from importing these modules: most of them are broken on purpose."""

collect_ignore_glob = ["*"]
