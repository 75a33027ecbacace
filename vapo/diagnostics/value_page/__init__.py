"""A page that shows the value model's predictions token by token (docs/value_page.md)."""
