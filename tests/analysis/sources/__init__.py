"""Tests of the logs of other trainers."""
