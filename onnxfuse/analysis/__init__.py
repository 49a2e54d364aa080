"""Read-only facts about loops: pattern kinds, roles, traffic. No decisions here."""
