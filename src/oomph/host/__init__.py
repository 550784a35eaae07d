"""Memory beside the GPU: the host's and the disk's, and the way there."""
