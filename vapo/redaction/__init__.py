"""What is a secret, and how a text is shown without it. Light to import, and below all rooms."""
