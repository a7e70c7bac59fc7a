"""How long the package and its commands take to start."""
