"""What it takes to run Millstream somewhere: configurations, demo data, container files."""
