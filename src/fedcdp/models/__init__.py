"""Networks and fixed features."""
