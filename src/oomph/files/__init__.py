"""Safe reading of files from any source, and writing of oomph's own files."""
