"""Operating rallypoint: benchmarks, Prometheus rules, fault injection."""
