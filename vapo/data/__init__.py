"""From files, data sets and generators to rows and training prompts."""
