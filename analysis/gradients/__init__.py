"""Gradient analyses: tables, published metrics and figures."""
