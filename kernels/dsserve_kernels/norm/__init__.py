"""CPU bodies of RMSNorm and the rotary embedding."""
