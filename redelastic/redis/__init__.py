"""How Redis is reached: an endpoint, a client, calls that retry, scripts, keys, and a private server."""
