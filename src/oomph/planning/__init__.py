"""Questions around a job that its estimate can answer: how large it may be, which cards hold it."""
