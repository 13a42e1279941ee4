"""Comparisons, criteria, regression, reports and plots."""
