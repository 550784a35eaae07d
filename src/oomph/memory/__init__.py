"""Memory outside the GPU, on the host and on disk, and the copies to and from it."""
