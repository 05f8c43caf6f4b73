"""Grafana dashboards as code: definitions, the JSON that Grafana reads, and pictures without Grafana."""
