"""What `turbofs doctor` looks at: small functions, each one question, none of which touches a mount."""
