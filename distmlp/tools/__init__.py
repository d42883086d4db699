"""Tools around training: each a leaf that nothing else imports."""
