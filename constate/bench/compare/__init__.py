"""`constate compare`: from measurements of several models to one report. See report.py."""
