"""The deployment protocol: what runs inside Flower, on the server and on every client."""
