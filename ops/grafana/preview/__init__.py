"""Dashboards as pages and pictures, for people without Grafana."""
