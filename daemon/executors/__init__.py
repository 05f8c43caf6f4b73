"""What touches the world for the decisions: store, processes, sockets, HTTP, files."""
