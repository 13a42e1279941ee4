"""What the report shows: functions from the report's data to sections of sentences and tables."""
