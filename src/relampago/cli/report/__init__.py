"""The committed measurements as tables (README, docs), pictures, and a page: `relampago bench --report`."""
