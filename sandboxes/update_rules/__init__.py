"""Update rules for policies: a catalogue of rules on toy tasks, with delays, replay and noisy rewards."""
