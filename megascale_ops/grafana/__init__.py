# SPDX-License-Identifier: Apache-2.0
"""Dashboards on their way: found in the installation, checked, written into a folder, pushed to a Grafana server."""
