"""The step that is rehearsed and run; applying and undoing plans; steps as transactions."""
