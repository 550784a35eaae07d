"""One-line integrations into popular frameworks; each is imported only when it is used."""
