"""Pictures as SVG and pages as HTML: no script, no font, no network, light and dark."""
