"""The demo: a small transformer trained by our step hook, beside its twin trained by torch."""
