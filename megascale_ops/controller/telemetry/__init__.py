# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: what happens to jobs as spans and logs, sent by OTLP to a collector that the user names."""
