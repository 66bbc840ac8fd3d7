# SPDX-License-Identifier: Apache-2.0
"""Tell people of incidents where they are: a chat, any HTTP service, e-mail, a command; see README.md."""
