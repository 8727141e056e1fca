"""The deployment protocol: the code that runs inside Flower, on the server and on every client."""
