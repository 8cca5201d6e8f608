"""One file per side; each fulfils `base.Side`."""
