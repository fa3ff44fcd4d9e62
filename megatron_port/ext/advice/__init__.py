"""Advice in messages: what is nearest to what was asked, found by name when something is wrong."""
