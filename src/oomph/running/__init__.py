"""What happens on the device: the step itself."""
