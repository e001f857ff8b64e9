# SPDX-License-Identifier: Apache-2.0
"""Selectors: what attends in a layer's place. `base` says what one is."""
