# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboards as code: each file of questions answers with one dashboard, ``writing`` puts them on disk."""
