"""What bench/report.py writes: a module for each page, the charts, and the choice of the data."""
