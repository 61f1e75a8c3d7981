"""From a trained or released drafter to traffic: the rollout checklist as code, with a record that can be read again."""
