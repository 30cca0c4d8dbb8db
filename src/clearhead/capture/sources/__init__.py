"""Where attention is captured: transformers' attention interface, returned attentions, custom modules."""
