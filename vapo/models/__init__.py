"""Hugging Face folders: reading, checking, importing, adapters, networks on devices."""
