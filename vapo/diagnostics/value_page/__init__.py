"""A page that shows what the value model believes, token by token (docs/value_page.md)."""
