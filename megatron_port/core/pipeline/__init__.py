"""Schedules as data, their runner, and their simulation."""
