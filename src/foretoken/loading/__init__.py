"""Loading of models: folders, the hub, backends, drafts given by name. Does not depend on prompts
and generates nothing."""
