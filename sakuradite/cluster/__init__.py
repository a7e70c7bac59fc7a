"""Sakuradite on Ray: a local Ray for embedded use, the daemon, and the Serve deployments that both are made of."""
