"""The HTTP application, served by a real uvicorn on loopback over an engine in the same process."""
