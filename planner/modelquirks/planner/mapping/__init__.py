"""How what the checkpoint holds becomes what the model needs, and the account of both sides."""
