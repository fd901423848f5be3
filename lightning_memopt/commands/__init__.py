"""What can be done from a shell, one command a file: arguments in, a page or JSON out."""
