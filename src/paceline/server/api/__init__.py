"""The endpoints of the HTTP API: what requests and responses look like."""
