"""Where daemon and trainer meet, without torch: messages, configuration, plan, env budget."""
