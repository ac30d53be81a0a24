"""The endpoints of the HTTP API: the formats of requests and responses."""
